#!/bin/sh
set -e
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then
	systemctl disable --now fairlead-agent.service
fi
# What `agent install` has started by this package's program, where systemd does not run.
if [ "$1" = remove ] && grep -Eqs "^[Cc]ommand *= */usr/bin/fairlead agent|^command='/usr/bin/fairlead'" /etc/wsl.conf /etc/init.d/fairlead-agent; then
	/usr/bin/fairlead agent uninstall || :
fi
