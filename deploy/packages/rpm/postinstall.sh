#!/bin/sh
# The service is left to its user: systemctl enable --now fairlead-agent
if [ -d /run/systemd/system ]; then
	systemctl daemon-reload || :
	if [ "$1" -gt 1 ]; then # an upgrade
		systemctl try-restart fairlead-agent.service ||
			echo "fairlead: the agent did not start again: see \`journalctl -u fairlead-agent\`" >&2
	fi
fi
# What an archive left is used before what this package has.
if grep -qs '^# Written by `fairlead agent install`' /etc/systemd/system/fairlead-agent.service; then
	echo "fairlead: /etc/systemd/system/fairlead-agent.service is used instead of this package's unit: run \`fairlead agent uninstall\`, then \`systemctl enable --now fairlead-agent\`" >&2
fi
if [ -e /usr/local/bin/fairlead ]; then
	echo "fairlead: /usr/local/bin/fairlead is found before this package's /usr/bin/fairlead: remove it" >&2
fi
