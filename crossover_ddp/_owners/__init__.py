"""What has an owner: who it is, where it travels, what its owner keeps. Shared by K-FAC, Muon and `owners="layers"`."""
