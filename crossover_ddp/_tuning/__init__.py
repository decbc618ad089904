"""What a step will take on this link: a cost model, and a probe of the link."""
