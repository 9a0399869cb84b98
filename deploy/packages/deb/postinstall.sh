#!/bin/sh
set -e
# The service is left to its user: systemctl enable --now fairlead-agent
if [ "$1" = configure ] && [ -d /run/systemd/system ]; then
	systemctl daemon-reload
	if [ -n "$2" ]; then # an upgrade from version $2
		systemctl try-restart fairlead-agent.service
	fi
fi
