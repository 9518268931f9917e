"""The torchrun launcher, the worker it starts, and `doctor`."""
