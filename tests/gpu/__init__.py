"""What only a CUDA device can show; skipped, with the reason, where there is none. See docs/gpu.md."""
