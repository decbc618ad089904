"""The experiments behind the documents; each script says at its top how it is started."""
