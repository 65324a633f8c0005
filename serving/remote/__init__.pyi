from .remote_model import RemoteModel as RemoteModel
from .remote_model import open_model as open_model
from .remote_session import RemoteSession as RemoteSession
from .remote_session import connect as connect
from .request_codec import Progress as Progress
