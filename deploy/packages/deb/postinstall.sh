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
if [ "$1" != configure ]; then
	exit 0
fi
# What an archive left is used before what this package has.
if grep -qs '^# Written by `fairlead agent install`' /etc/systemd/system/fairlead-agent.service; then
	echo "fairlead: /etc/systemd/system/fairlead-agent.service is used instead of this package's unit: run \`fairlead agent uninstall\`, then \`systemctl enable --now fairlead-agent\`" >&2
fi
if [ -e /usr/local/bin/fairlead ]; then
	echo "fairlead: /usr/local/bin/fairlead is found before this package's /usr/bin/fairlead: remove it" >&2
fi
