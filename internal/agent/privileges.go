// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/internal/kernel"
	"github.com/fairlead/fairlead/internal/privilege"
	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/source/socket"
)

// hooked has hooks of its own. It returns none before it tried to attach them.
type hooked interface{ Hooks() []kernel.Method }

// Confine drops the capabilities that the agent does not need, for the whole process, and
// has Run drop those that only attaching hooks needs. It is for programs that run nothing
// but an agent.
func (a *Agent) Confine() {
	if a.cfg.KeepPrivileges {
		a.keepCapabilities("--keep-privileges is set")
		return
	}
	needs := a.needs()
	a.capabilities = privilege.SetOf(needs, true)
	if privilege.MapsNeedCapability() {
		a.capabilities |= privilege.Maps()
	}
	a.confined = a.limit(privilege.SetOf(needs, false))
}

// limit reports whether capabilities were reduced to those of keep.
func (a *Agent) limit(keep privilege.Set) bool {
	err := privilege.Limit(keep)
	if err != nil {
		a.keepCapabilities(err.Error())
	}
	return err == nil
}

func (a *Agent) keepCapabilities(why string) {
	a.unconfined.Store(&why)
	a.log.Warn("keeping unneeded capabilities", "reason", why)
}

// needs returns what this agent needs with its configuration.
func (a *Agent) needs() []privilege.Need {
	needs := privilege.Agent()
	if a.usesUserSockets() {
		needs = append(needs, privilege.UserSockets())
	}
	return needs
}

// usesUserSockets reports whether an engine's socket is that of a user.
func (a *Agent) usesUserSockets() bool {
	var paths []string
	for _, s := range a.sources {
		if s, ok := s.(interface{ Sockets() []string }); ok {
			paths = append(paths, s.Sockets()...)
		}
	}
	return slices.ContainsFunc(paths, ofUser)
}

// ofUser reports whether a socket, which may not exist yet, is below a user's directory
// or belongs to another user.
func ofUser(path string) bool {
	resolved, existing := resolve(path)
	if belowUser(path) || belowUser(resolved) {
		return true
	}
	fi, err := os.Stat(existing)
	if err != nil {
		return false
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	ours := ok && int(st.Uid) == os.Geteuid()
	// Root owns the directories of everybody, as /run: that says nothing of the socket.
	return ok && !ours && (st.Uid != 0 || existing == resolved)
}

func belowUser(path string) bool {
	return strings.HasPrefix(path, "/home/") || strings.HasPrefix(path, "/run/user/") && !strings.HasPrefix(path, "/run/user/0/")
}

// maxSteps bounds the links and names that resolve follows, as links may form a loop.
const maxSteps = 255

// resolve follows the symbolic links of a path whose last parts may not exist yet. It
// returns the path without links and the part of that which exists, path and "" if there
// are too many links.
func resolve(path string) (resolved, existing string) {
	at, missing := path, ""
	for range maxSteps {
		if p, err := filepath.EvalSymlinks(at); err == nil {
			return filepath.Join(p, missing), p
		}
		to, err := os.Readlink(at)
		switch {
		case err != nil:
			at, missing = filepath.Dir(at), filepath.Join(filepath.Base(at), missing)
		case filepath.IsAbs(to):
			at = to
		default:
			at = filepath.Join(filepath.Dir(at), to)
		}
	}
	return path, ""
}

// attachPoll is how often it is looked whether all hooks were tried.
const attachPoll = 100 * time.Millisecond

// limitAttached drops what attaching hooks needed, when all were tried. It does not wait
// for engines, which may never answer.
func (a *Agent) limitAttached(ctx context.Context) {
	for !a.attached() {
		if err := schedule.Sleep(ctx, attachPoll); err != nil {
			return
		}
	}
	if a.limit(a.capabilities) {
		a.log.Debug("capabilities dropped that only attaching hooks needs")
	}
}

// attached reports whether all hooks were tried.
func (a *Agent) attached() bool {
	observes := slices.ContainsFunc(a.sources, func(s Source) bool { return s.Name() == socket.Name })
	if observes && a.observer.Methods() == nil {
		return false
	}
	for _, h := range a.hooked() {
		if h.Hooks() == nil {
			return false
		}
	}
	return true
}

// hooked returns the sources and sinks with hooks.
func (a *Agent) hooked() (list []hooked) {
	for _, s := range a.sources {
		if h, ok := s.(hooked); ok {
			list = append(list, h)
		}
	}
	for _, s := range a.sinks {
		if h, ok := s.(hooked); ok {
			list = append(list, h)
		}
	}
	return list
}
