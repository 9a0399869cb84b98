#!/bin/sh
# The service is left to its user: systemctl enable --now fairlead-run
if [ -d /run/systemd/system ]; then
	systemctl daemon-reload || :
	# Only one that runs, after an upgrade.
	systemctl try-restart fairlead-run.service ||
		echo "fairlead-run: it did not start again: see \`journalctl -u fairlead-run\`" >&2
fi
