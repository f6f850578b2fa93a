"""States of methods from step to step; a call without them never comes here."""
