"""Integrations with other libraries, imported only on request."""
