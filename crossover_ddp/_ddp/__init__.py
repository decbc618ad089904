"""What is known of torch's DistributedDataParallel: what it hands to a hook, the model behind that, and its group."""
