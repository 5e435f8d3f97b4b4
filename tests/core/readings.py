"""Old names of tests.models.fixtures."""

from tests.models.fixtures import *  # noqa: F403
from tests.models.fixtures import (  # noqa: F401
    EmbedBatch as Reading,
)
from tests.models.fixtures import (
    activation_axes as axes,  # noqa: F401
)
from tests.models.fixtures import (
    assert_all_close as all_same,  # noqa: F401
)
from tests.models.fixtures import (
    assert_close as same,  # noqa: F401
)
from tests.models.fixtures import (
    assert_same_cache as same_held,  # noqa: F401
)
from tests.models.fixtures import (
    assert_within_float32_floor as within_floor,  # noqa: F401
)
from tests.models.fixtures import (
    embed_batches as readings,  # noqa: F401
)
from tests.models.fixtures import (
    masks as patterns,  # noqa: F401
)
from tests.models.fixtures import (
    read_in_chunks as in_pieces,  # noqa: F401
)
from tests.models.fixtures import (
    read_row_alone as alone,  # noqa: F401
)
from tests.models.fixtures import (
    read_whole as at_once,  # noqa: F401
)
from tests.models.fixtures import (
    valid_slots as held,  # noqa: F401
)
