"""Training one decoder under every sharding strategy, with the same loop and the same records."""

from launcher.orphans import die_with_parent

die_with_parent()  # here, before anything else is imported: a parent may be killed meanwhile
