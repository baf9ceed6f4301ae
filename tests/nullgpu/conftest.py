"""Only `make test-rehearse` collects what is in here: it needs torch's CUDA build."""

import os

if "SHARDSCALE_TEST_REHEARSE" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
