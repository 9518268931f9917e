"""nn.Modules built on `megamoe.functional`."""
