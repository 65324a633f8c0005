from .file import onnx_files as onnx_files
from .session import OnnxModel as OnnxModel
from .session import as_torch as as_torch
