"""The package's version, which results carry."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("psd-utils")
except PackageNotFoundError:  # used from a source tree that is not installed
    __version__ = "unknown"
