"""Tests that need a CUDA device, or the fake one (tests/fake_cuda). See docs/gpu.md."""
