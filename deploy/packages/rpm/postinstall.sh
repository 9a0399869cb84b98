#!/bin/sh
# The service is left to its user: systemctl enable --now fairlead-agent
if [ -d /run/systemd/system ]; then
	systemctl daemon-reload || :
	if [ "$1" -gt 1 ]; then # an upgrade
		systemctl try-restart fairlead-agent.service ||
			echo "fairlead: the agent did not start again: see \`journalctl -u fairlead-agent\`" >&2
	fi
fi
