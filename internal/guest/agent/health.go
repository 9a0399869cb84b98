// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/status/version"
)

// notReady returns why the agent is not ready, or "" if it is.
func (a *Agent) notReady() string {
	for _, s := range a.registry.Sources().View().All() {
		if s.State == "starting" {
			return "source " + s.Name + " is starting"
		}
	}
	select {
	case <-a.reconciler.FirstSync():
		return ""
	default:
		return "a sink has not completed its first sync"
	}
}

// statusPause is the least time between two status lines for systemd.
const statusPause = 10 * time.Second

// notifier reports readiness, liveness and status to systemd. Without NOTIFY_SOCKET
// it does nothing.
type notifier struct {
	send     func(state string) (bool, error)
	watchdog time.Duration // 0 if disabled
	a        *Agent
}

func newNotifier(a *Agent) *notifier {
	every, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		a.log.Warn("systemd watchdog disabled", "err", err)
	}
	return &notifier{
		send: func(state string) (bool, error) { return daemon.SdNotify(false, state) }, watchdog: every, a: a,
	}
}

// run notifies systemd until ctx ends.
func (n *notifier) run(ctx context.Context) error {
	if sent, err := n.send("STATUS=waiting for all sources"); !sent {
		if err != nil {
			n.a.log.Warn("cannot notify systemd", "err", err)
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
	report := func() { _, _ = n.send("STATUS=" + summary(n.a.provider.counts())) }
	report()
	outcomes := n.a.reconciler.Outcomes().Watch()
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
			report()
			changed = outcomes.C()
		}
	}
}

// beat reports liveness. It acquires the registry's lock first, which a deadlocked
// agent never releases.
func (n *notifier) beat() {
	n.a.registry.Touch()
	_, _ = n.send(daemon.SdNotifyWatchdog)
}

// summary describes all publications in one line.
func summary(active, all int) string {
	return fmt.Sprintf("%d of %d ports reachable on the host", active, all)
}

// logStart logs what this agent is and how it is configured.
func (a *Agent) logStart() {
	var sinks []string
	for _, s := range a.sinks {
		sinks = append(sinks, s.Name())
	}
	if a.hostlink != nil {
		sinks = append(sinks, a.hostlink.Name())
	}
	a.log.Info("starting", "version", version.String(), "config", cmp.Or(a.cfg.File(), "none"),
		"sources", strings.Join(a.cfg.Sources, ","), "sinks", strings.Join(sinks, ","), "link", strings.Join(a.endpoints(), ","), "control", a.cfg.Control)
}

// logReady logs once that everything was reported, and where a host can connect.
func (a *Agent) logReady(ctx context.Context) {
	if schedule.Wait(ctx, time.Time{}, a.reconciler.FirstSync()) != nil {
		return
	}
	_, all := a.provider.counts()
	args := []any{"ports", all}
	if a.hostlink != nil && !a.hostlink.Stats().Connected {
		args = append(args, "waitingForHostAt", strings.Join(a.endpoints(), ","))
	}
	a.log.Info("ready", args...)
}
