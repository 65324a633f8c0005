from .codec import Progress as Progress
from .model import RemoteModel as RemoteModel
from .model import open_model as open_model
from .session import RemoteSession as RemoteSession
from .session import connect as connect
