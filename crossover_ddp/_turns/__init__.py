"""Turns on a device: rules (pure), the segment that siblings share, the job's channel, order on the device."""
