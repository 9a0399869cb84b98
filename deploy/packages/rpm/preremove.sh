#!/bin/sh
if [ "$1" -eq 0 ] && [ -d /run/systemd/system ]; then
	systemctl disable --now fairlead-agent.service || :
fi
# What `agent install` has started by this package's program, where systemd does not run.
if [ "$1" -eq 0 ] && grep -Eqs "^[Cc]ommand *= */usr/bin/fairlead agent|^command='/usr/bin/fairlead'" /etc/wsl.conf /etc/init.d/fairlead-agent; then
	/usr/bin/fairlead agent uninstall || :
fi
