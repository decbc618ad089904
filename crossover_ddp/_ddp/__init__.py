"""What is known of torch's DistributedDataParallel: what it hands to a hook, and the model behind that."""
