#!/bin/sh
if [ "$1" -eq 0 ] && [ -d /run/systemd/system ]; then
	systemctl disable --now fairlead-agent.service || :
fi
