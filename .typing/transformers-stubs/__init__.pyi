"""The names of transformers that are used here: add one to use another. Its own `__init__` imports all of its models, a
third of all files that pyright would read."""

from . import dynamic_module_utils as dynamic_module_utils
from .configuration_utils import PreTrainedConfig as PreTrainedConfig
from .models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from .tokenization_utils_base import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from .tokenization_utils_tokenizers import PreTrainedTokenizerFast as PreTrainedTokenizerFast
