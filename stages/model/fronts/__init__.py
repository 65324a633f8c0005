"""Modules in front of the user's model: what the columns become before they are its inputs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
