"""Training one decoder under every sharding strategy, with the same loop and the same records."""

from launcher.util.command import begin
from launcher.util.orphans import die_with_parent

# Here, before anything else is imported: Ctrl-C may come, or a parent be killed, meanwhile.
begin()
die_with_parent()
