"""What the process has imported that the tests' trainers and ranks are forked from."""

import elastic_train.preload  # noqa: F401
import tests.conftest  # noqa: F401 - with all that most test modules import
from tests.huge_pages import use_huge_pages

use_huge_pages()
