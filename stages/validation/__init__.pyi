from .larger import validate_on_set as validate_on_set
from .validate import ValidationReport as ValidationReport
from .validate import validate_candidate as validate_candidate
from .validate import validate_session as validate_session
