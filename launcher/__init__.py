"""Training one decoder under every sharding strategy, with the same loop and the same records."""

from launcher.util.processes import die_with_parent
from launcher.util.startup import begin

# Here, before anything else is imported: Ctrl-C may come, or a parent be killed, meanwhile.
begin()
die_with_parent()
