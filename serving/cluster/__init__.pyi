from .deployment_files import SERVER_OPTION as SERVER_OPTION
from .deployment_files import Address as Address
from .deployment_files import envoy_config as envoy_config
from .deployment_files import helm_values as helm_values
from .deployment_files import remarks as remarks
from .needs import ClusterOptions as ClusterOptions
from .needs import Needs as Needs
from .needs import needs_of as needs_of
