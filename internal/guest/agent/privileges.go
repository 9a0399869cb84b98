// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/config/privilege"
	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/guest/source/socket"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// hooked has hooks of its own. It returns none before it tried to attach them.
type hooked interface{ Hooks() []kernel.Method }

// Confine drops the capabilities that the agent does not need, for the whole process, and
// has Run drop those that only attaching hooks needs. It is for programs that run nothing but
// an agent.
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
	return slices.ContainsFunc(paths, privilege.OfUser)
}

// limitAttached drops what attaching hooks needed, when all were tried: memory, and the
// capabilities of a confined agent. It does not wait for engines, which may never answer.
func (a *Agent) limitAttached(ctx context.Context) {
	for !a.attached() {
		if err := schedule.Wait(ctx, time.Time{}, a.tried); err != nil {
			return
		}
	}
	a.types.Forget()
	if a.confined && a.limit(a.capabilities) {
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
