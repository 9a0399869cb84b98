#!/bin/sh
# Not for an upgrade, for which dpkg passes "upgrade" and rpm 1.
if [ -d /run/systemd/system ] && { [ "$1" = remove ] || [ "$1" = 0 ]; }; then
	systemctl disable --now fairlead-run.service || :
fi
