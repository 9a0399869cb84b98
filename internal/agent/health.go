// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
)

// notReady says why not everything that is there has been seen and told.
func (a *Agent) notReady() string {
	for _, s := range a.registry.Sources().View().All() {
		if s.State == "starting" {
			return "source " + s.Name + " has not yet seen everything"
		}
	}
	select {
	case <-a.reconciler.FirstSync():
		return ""
	default:
		return "not every sink has been told what there is"
	}
}

// statusPause is the least time between two lines of status for systemd.
const statusPause = 10 * time.Second

// notifier tells systemd that the agent is ready, that it lives, and what it
// does. Where nobody asks (no NOTIFY_SOCKET) it costs nothing.
type notifier struct {
	send     func(state string) (bool, error)
	watchdog time.Duration // 0 if systemd does not watch
	a        *Agent
}

func newNotifier(a *Agent) *notifier {
	every, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		a.log.Warn("the watchdog of systemd is not heeded", "err", err)
	}
	return &notifier{
		send: func(state string) (bool, error) { return daemon.SdNotify(false, state) }, watchdog: every, a: a,
	}
}

// run tells until ctx ends.
func (n *notifier) run(ctx context.Context) error {
	if heard, err := n.send("STATUS=waiting for the first look at everything"); !heard {
		if err != nil {
			n.a.log.Warn("systemd cannot be told", "err", err)
		}
		return nil
	}
	defer func() { _, _ = n.send(daemon.SdNotifyStopping) }()
	var alive <-chan time.Time
	if n.watchdog > 0 {
		t := time.NewTicker(n.watchdog / 2)
		defer t.Stop()
		alive = t.C
	}
	for ready := false; !ready; {
		select {
		case <-ctx.Done():
			return nil
		case <-alive:
			n.beat()
		case <-n.a.reconciler.FirstSync():
			ready = true
		}
	}
	_, _ = n.send(daemon.SdNotifyReady)
	tell := func() { _, _ = n.send("STATUS=" + summary(n.a.provider.counts())) }
	tell()
	outcomes := n.a.reconciler.Outcomes().Subscribe()
	defer outcomes.Close()
	pause := time.NewTimer(statusPause)
	pause.Stop()
	defer pause.Stop()
	changed := outcomes.C()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-alive:
			n.beat()
		case <-changed:
			outcomes.Take()
			changed = nil // until the pause is over
			pause.Reset(statusPause)
		case <-pause.C:
			tell()
			changed = outcomes.C()
		}
	}
}

// beat says that the agent lives. It takes the registry's lock on the way, which
// an agent that hangs does not give.
func (n *notifier) beat() {
	n.a.registry.Touch()
	_, _ = n.send(daemon.SdNotifyWatchdog)
}

// summary is one line about all publications.
func summary(active, all int) string {
	return fmt.Sprintf("%d of %d ports reachable on the host", active, all)
}
