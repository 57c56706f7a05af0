"""Build of the package: metadata lives in pyproject.toml; the C++ extension is added here once csrc/ has one."""

from setuptools import setup

setup()
