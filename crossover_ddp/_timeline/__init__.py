"""Record when jobs computed and communicated; merge, measure and draw the recordings."""
