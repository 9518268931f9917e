"""Everything declarative stands in pyproject.toml; this file is here for what TOML cannot say."""

from setuptools import setup

setup()
