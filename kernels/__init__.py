"""The kernel tier: number formats, weight transforms, and one entry module per kernel family."""
