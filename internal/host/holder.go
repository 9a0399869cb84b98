// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/port"
)

// Socket names a listening socket by what it is bound to.
type Socket struct {
	Protocol port.Protocol
	Addr     netip.AddrPort
}

// Holder is who holds an address: a process, or the system itself.
type Holder struct {
	PID  int    // 0 if not known
	Name string // its command; text to be quoted
	// Reserved is set if the port is in a range that the operating system, called
	// Name, reserves.
	Reserved PortRange
}

// HolderFinder finds the holders of addresses that are in use. It may take long, and
// leaves out those that it does not find. With an error it may leave out others, too.
type HolderFinder interface {
	Holders(ctx context.Context, sockets []Socket) (map[Socket]Holder, error)
}

// Vetter is a HolderFinder for systems on which listen succeeds although another
// process has the port.
type Vetter interface {
	// Vet reports whether another process would share the port of a socket, by what the system
	// says now. It may take long; what it returns does not.
	Vet() (taken func(Socket) bool)
}

// relayName begins the name of the program that is WSL's own relay.
const relayName = "wslrelay"

// reason is why an address that is held cannot be had.
func (h Holder) reason(at netip.AddrPort) (port.State, port.Reason) {
	if h.Reserved != (PortRange{}) {
		return port.Failed, port.Because(port.RangeReserved, h.Name, h.Reserved.String(), strconv.Itoa(int(at.Port())))
	}
	code := port.InUseBy
	if strings.HasPrefix(h.Name, relayName) {
		code = port.InUseByRelay
	}
	return port.Conflict, port.Because(code, at.String(), strconv.Quote(h.Name), strconv.Itoa(h.PID))
}

// errTaken is the conflict that a Vetter found.
var errTaken = errors.New("another process listens there")

// findHolders looks up the holders of addresses that are in use, many at a time and
// without the lock.
func (h *Host) findHolders(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-h.lookup:
		}
		asked := h.takeUnheld()
		if len(asked) == 0 {
			continue
		}
		holders, err := h.opt.Holders.Holders(ctx, slices.Collect(maps.Values(asked)))
		if err != nil {
			h.opt.Logger.Debug("look-up of port holders failed", "err", err)
		}
		h.found(asked, holders, err)
	}
}

// takeUnheld returns the slots whose holders are to be looked up.
func (h *Host) takeUnheld() map[*slot]Socket {
	l := h.lock()
	defer l.unlock()
	asked := make(map[*slot]Socket, len(l.unheld))
	for s := range l.unheld {
		asked[s] = Socket{s.protocol, s.at()}
	}
	l.unheld = make(map[*slot]struct{})
	return asked
}

// found says who holds the addresses of slots. After an error, holders may be missing.
func (h *Host) found(asked map[*slot]Socket, holders map[Socket]Holder, err error) {
	defer h.lockToOpen().unlock() // a port that is known to have a holder may move
	for s := range asked {
		if s.closed.Load() || s.listener != nil {
			continue
		}
		t := s.trouble()
		if by, ok := holders[Socket{s.protocol, s.at()}]; ok {
			t.whyState, t.why = by.reason(s.at())
			s.state, s.reason = t.whyState, t.why
			s.show()
		} else if err == nil { // the next attempt says what it finds
			t.why = port.Reason{}
		}
	}
}
