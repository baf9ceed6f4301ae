"""python -m launcher.submit: `shardscale submit` without the other verbs."""

import sys

from launcher.submit import main

sys.exit(main(sys.argv[1:]))
