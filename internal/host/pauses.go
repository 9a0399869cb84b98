// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"io/fs"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

const stableAfter = 10 * time.Second // the next attempt after a session this long is prompt

// replacedMax is the longest pause of a host whose guest another host took over.
// If both came back soon, each would reset the flows of the other again and again.
const replacedMax = 5 * time.Minute

// replacedError says that another host took over, and what follows.
func replacedError(pause time.Duration, dials bool) error {
	then := "waiting until it dials again"
	if !dials {
		then = "retrying in " + pause.Round(time.Second).String()
	}
	return fmt.Errorf("another host took over this guest, which serves one host at a time; %s", then)
}

// replaced reports whether a session ended because another host took over.
func replaced(err error) bool {
	var closed *link.CloseError
	return errors.As(err, &closed) && closed.Remote && closed.Reason == link.ReasonReplaced
}

// Codes of why there is no session, beside those of link.Refusal.
const (
	CodeReplaced   = "replaced"   // another host took over
	CodeTokenFile  = "token-file" // our token cannot be read
	CodePermission = "permission" // we may not open the link's socket
	CodeNoMachine  = "no-machine" // no machine has the CID of the link
)

// codeOf returns the code of why there is no session, empty if it has none, and whether
// the guest refused us.
func codeOf(err error) (code string, remote bool) {
	var refused *link.RefusedError
	switch {
	case replaced(err):
		return CodeReplaced, true
	case errors.As(err, &refused) && refused.Code == link.RefusedToken && refused.Err != nil:
		return CodeTokenFile, false
	case errors.As(err, &refused):
		return string(refused.Code), refused.Remote
	case errors.Is(err, fs.ErrPermission):
		return CodePermission, false
	case errors.Is(err, syscall.ENODEV):
		return CodeNoMachine, false
	}
	return "", false
}

// servedMax is the longest pause after a session in which the guest served: it is
// most likely back at once. Only after many brief sessions in a row are pauses longer.
const servedMax = 500 * time.Millisecond

const (
	briefSession  = 250 * time.Millisecond // a shorter session is of no use to anybody
	briefSessions = 10                     // in a row, before the pauses grow beyond servedMax
)

// pauses are those between the sessions of a guest.
type pauses struct {
	failed, served, brief, replaced schedule.Backoff

	briefs int // brief sessions in a row, up to briefSessions
}

// newPauses returns those of a guest. One that dials decides by itself when it comes back, so
// the host waits only for what is taken over in a loop.
func newPauses(o Options, dials bool) *pauses {
	p := &pauses{
		failed:   schedule.Backoff{Min: o.BackoffMin, Max: o.BackoffMax, Jitter: 0.25},
		served:   schedule.Backoff{Min: o.BackoffMin, Max: max(o.BackoffMin, min(servedMax, o.BackoffMax)), Jitter: 0.25},
		brief:    schedule.Backoff{Min: max(o.BackoffMin, 2*servedMax), Max: max(o.BackoffMin, o.BackoffMax), Jitter: 0.25},
		replaced: schedule.Backoff{Min: o.BackoffMax, Max: max(replacedMax, o.BackoffMax), Jitter: 0.25},
	}
	if dials {
		p.replaced = p.served
	}
	return p
}

// next returns the pause after a session, or the attempt at one, ended with err.
// A guest served if a snapshot of it was applied.
func (p *pauses) next(err error, lasted time.Duration, served bool) time.Duration {
	if lasted >= 2*replacedMax {
		p.replaced.Reset()
	}
	if replaced(err) {
		return p.replaced.Next()
	}
	if lasted >= stableAfter {
		p.failed.Reset()
		p.served.Reset()
	}
	if lasted >= briefSession {
		p.briefs = 0
		p.brief.Reset()
	}
	if !served || errors.Is(err, errProtocol) {
		return p.failed.Next()
	}
	p.failed.Reset()
	if lasted < briefSession {
		if p.briefs == briefSessions {
			return p.brief.Next()
		}
		p.briefs++
	}
	return p.served.Next()
}
