"""What only a CUDA device can show; on the fake one (tests/fake_cuda) where there is none. See docs/gpu.md."""
