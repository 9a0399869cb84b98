#!/bin/sh
set -e
# The service is left to its user: systemctl enable --now fairlead-agent
if [ "$1" = configure ] && [ -d /run/systemd/system ]; then
	systemctl daemon-reload || :
	if [ -n "$2" ]; then # an upgrade from version $2
		# An agent that does not start is no reason to leave the package half installed.
		systemctl try-restart fairlead-agent.service ||
			echo "fairlead: the agent did not start again: see \`journalctl -u fairlead-agent\`" >&2
	fi
fi
