"""A model in an ONNX file: ONNX Runtime computes the answers, torch operations make the program."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
