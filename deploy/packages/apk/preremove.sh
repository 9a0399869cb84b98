#!/bin/sh
rc-service --ifstarted fairlead-agent stop
rc-update --all delete fairlead-agent 2>/dev/null || :
# What `agent install` has started by this package's program, where OpenRC does not run.
if grep -Eqs "^[Cc]ommand *= */usr/bin/fairlead agent" /etc/wsl.conf; then
	/usr/bin/fairlead agent uninstall || :
fi
