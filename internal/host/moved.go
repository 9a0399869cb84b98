// SPDX-License-Identifier: Apache-2.0

package host

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/fairlead/fairlead/internal/config/trust"
	"github.com/fairlead/fairlead/internal/port"
)

// move is a port that is opened instead of another one, which was in use. It remains when
// that one is free again, and over restarts, so that its users find it where it was.
type move struct {
	Wanted uint16 `json:"wanted"`
	Port   uint16 `json:"port"`
}

// Ports that "any" opens: below those that systems give to clients.
const anyFirst, anyLast = 20000, 32767

const (
	maxTries = 64   // other ports that are tried for one publication
	maxMoved = 8192 // that are remembered, of both families
)

// rows returns the publications of a port, which move together: p, and that of its owner in the
// other family, if there is one and its rule lets it move. They are sorted by key.
func (p *publication) rows() []*publication {
	o := p.otherFamily()
	switch {
	case o == nil || !o.onConflict.Moves():
		return []*publication{p}
	case o.Compare(p.Key) < 0:
		return []*publication{o, p}
	}
	return []*publication{p, o}
}

// otherFamily returns the publication of p's owner in the other family, nil if there is none.
func (p *publication) otherFamily() *publication {
	k, ok := p.Key.OtherFamily()
	if o := p.guest.pubs[k]; ok && o != nil && o.fact.Owner.Same(p.fact.Owner) {
		return o
	}
	return nil
}

// portFor returns the port that is opened for a wanted one.
func (p *publication) portFor(wanted uint16) uint16 {
	if m, ok := p.moved(func(m move) bool { return m.Wanted == wanted }); ok {
		return m.Port
	}
	return wanted
}

// moved returns the first move of the port that is as it should be.
func (p *publication) moved(as func(move) bool) (move, bool) {
	if !p.onConflict.Moves() || len(p.guest.h.moved) == 0 {
		return move{}, false
	}
	for _, row := range p.rows() {
		if m, ok := p.guest.h.moved[row.id()]; ok && as(m) {
			return m, true
		}
	}
	return move{}, false
}

// instead is the reason of an active claim at a port, none if that is the wanted one.
func (p *publication) instead(n uint16) port.Reason {
	if m, ok := p.moved(func(m move) bool { return m.Port == n }); ok {
		return port.Because(port.Moved, strconv.Itoa(int(m.Wanted)))
	}
	return port.Reason{}
}

// note is the reason of an active claim that is open at an address.
func (p *publication) note(at netip.AddrPort) port.Reason {
	note := p.instead(at.Port())
	if p.exposed.IsZero() || at.Addr().IsLoopback() {
		return note
	}
	return port.Join(note, port.Because(port.OpenUntil, p.exposed.UTC().Format("2006-01-02 15:04:05 UTC")))
}

// remains is why a claim is in conflict, with why it does not move if its rule lets it.
func (p *publication) remains(why port.Reason) port.Reason {
	if !p.onConflict.Moves() || p.tries <= maxTries {
		return why
	}
	return port.Join(why, port.Because(port.NoneFree, p.onConflict.String(), strconv.Itoa(maxTries)))
}

// describe sets the reasons of the active claims again.
func (p *publication) describe() {
	p.guest.h.changed[p] = struct{}{}
	for _, c := range p.claims {
		if c.outcome.State == port.Active {
			c.set(port.Active, c.outcome.HostAddress, port.Reason{})
		}
	}
}

// remember ends the move of a row if the rules do not want it, or the port that it was from, any
// more. A row that comes later moves to where the other one of its port is.
func (p *publication) remember(wanted []netip.AddrPort) {
	h := p.guest.h
	wants := func(m move) bool {
		return slices.ContainsFunc(wanted, func(a netip.AddrPort) bool { return a.Port() == m.Wanted })
	}
	was, had := h.moved[p.id()]
	if had && (!p.onConflict.Moves() || !wants(was)) {
		delete(h.moved, p.id())
		h.unsaved.Notify()
	}
	if m, ok := p.moved(wants); ok && m != was {
		h.moved[p.id()] = m
		h.unsaved.Notify()
	}
}

// move gives another port to publications that have a conflict, if their rule says so,
// and reports whether there were any. What has tried enough ports, or whose guest has, waits
// for the wanted one.
func (h *locked) move() bool {
	var conflicts []*publication
	for p := range h.changed {
		if p.onConflict.Moves() && p.tries <= maxTries && p.guest.pubs[p.Key] == p && p.kept == nil && p.conflict() != 0 {
			conflicts = append(conflicts, p)
		}
	}
	if len(conflicts) == 0 {
		return false
	}
	slices.SortFunc(conflicts, func(a, b *publication) int { return a.id().Compare(b.id()) })
	kept := h.chosen()
	for _, p := range conflicts {
		if p.conflict() != 0 { // else it has moved with the other family
			h.moveOn(p, kept)
		}
	}
	return true
}

// moveOn gives a port that has a conflict, with all its rows, the next number, or the wanted
// one again after too many tries.
func (h *locked) moveOn(p *publication, chosen map[port.Slot][]ID) {
	p.tries++
	h.unsaved.Notify()
	at := p.conflict()
	from, moved := h.moved[p.id()]
	if !moved {
		from = move{Wanted: at, Port: at}
	}
	next := p.candidate(from, chosen)
	end := p.tries > maxTries || next == 0 || from.Port != at || !p.guest.limits.moves.Allow()
	if end {
		p.tries = maxTries + 1
	}
	rows := slices.DeleteFunc(p.rows(), func(row *publication) bool {
		return !slices.ContainsFunc(row.claims, func(c *claim) bool { return c.addr.Port() == at })
	})
	for _, row := range rows {
		row.tries = p.tries
		if end {
			delete(h.moved, row.id())
		} else {
			h.moved[row.id()] = move{from.Wanted, next}
		}
	}
	for _, row := range rows {
		row.guest.decideRow(row)
		h.touch(row) // it may say that it gave up
	}
}

// chosen returns what each port was chosen for.
func (h *locked) chosen() map[port.Slot][]ID {
	chosen := make(map[port.Slot][]ID, len(h.moved))
	for id, m := range h.moved {
		at := port.Slot{Protocol: id.Protocol, Port: m.Port}
		chosen[at] = append(chosen[at], id)
	}
	return chosen
}

// keptFrom reports whether a port is kept from what own names: for another one that is away, of
// another guest. Publications of one guest port share theirs, and
// what this guest publishes by itself gets ports whatever the order in which it comes; see claims.
func (g *lockedGuest) keptFrom(own ID, n uint16, chosen map[port.Slot][]ID) bool {
	return slices.ContainsFunc(chosen[port.Slot{Protocol: own.Protocol, Port: n}], func(id ID) bool {
		return id.Guest != own.Guest || id.Slot() != own.Slot() && g.pubs[id.Key] == nil
	})
}

// conflict returns a port of p that is in use, or 0. Where the port is exposed only the
// loopback counts: its users must find it where it was.
func (p *publication) conflict() uint16 {
	for _, c := range p.claims {
		if c.outcome.State == port.Conflict && (p.exposed.IsZero() || c.addr.Addr().IsLoopback()) {
			return c.addr.Port()
		}
	}
	return 0
}

// candidate returns the port to try after that of m, or 0 if there is none. Ports that were
// chosen for others are passed over. The order of "any" depends on the guest and its port
// alone, so that the publications of one server meet again.
func (p *publication) candidate(m move, chosen map[port.Slot][]ID) uint16 {
	own := p.id()
	if p.onConflict == port.OnConflictNext {
		n := m.Port + 1
		for n != 0 && p.guest.keptFrom(own, n, chosen) {
			n++
		}
		return n // 0 after the last
	}
	for ; p.tries <= maxTries; p.tries++ {
		sum := fnv.New32a()
		_, _ = fmt.Fprintf(sum, "%s %s %d %d", p.guest.name, p.Protocol, p.Port, p.tries)
		if n := uint16(anyFirst + sum.Sum32()%(anyLast-anyFirst+1)); !p.guest.keptFrom(own, n, chosen) {
			return n
		}
	}
	return 0
}

// remembered is a line of the file.
type remembered struct {
	Guest    string        `json:"guest"`
	Protocol port.Protocol `json:"protocol"`
	Address  netip.Addr    `json:"address"`
	Of       uint16        `json:"guestPort"`
	move
}

// loadMoved reads the file. What cannot be read is chosen anew.
func loadMoved(path string, log *slog.Logger) map[ID]move {
	moved := make(map[ID]move)
	if path == "" {
		return moved
	}
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return moved
	}
	var list []remembered
	if err == nil {
		err = json.Unmarshal(b, &list)
	}
	if err != nil {
		log.Warn("cannot read which ports were opened instead of others; choosing anew", "err", err)
	}
	for _, r := range list {
		k := port.Key{Protocol: r.Protocol, Address: r.Address, Port: r.Of}
		if r.Wanted != 0 && r.move.Port != 0 && r.Address.IsValid() {
			moved[ID{r.Guest, k}] = r.move
		}
	}
	return moved
}

// saveMoved writes the file after each change until ctx ends.
func (h *Host) saveMoved(ctx context.Context) {
	var failed bool
	for {
		select {
		case <-h.unsaved:
		case <-ctx.Done():
			select {
			case <-h.unsaved:
			default:
				return
			}
		}
		list := h.movedNow()
		if h.opt.MovedFile == "" {
			continue
		}
		err := writeMoved(h.opt.MovedFile, list)
		if err != nil && !failed {
			h.opt.Logger.Warn("cannot write which ports were opened instead of others", "err", err)
		}
		failed = err != nil
	}
}

// movedNow returns what is to be remembered. Of too many, those of ports that no guest has
// are dropped.
func (h *Host) movedNow() []remembered {
	l := h.lock()
	defer l.unlock()
	if len(l.moved) > maxMoved {
		current := make(map[ID]bool)
		for _, g := range l.guests {
			for _, p := range g.pubs {
				current[p.id()] = true
			}
		}
		maps.DeleteFunc(l.moved, func(id ID, _ move) bool { return !current[id] })
	}
	list := make([]remembered, 0, len(l.moved))
	for id, m := range l.moved {
		list = append(list, remembered{id.Guest, id.Protocol, id.Address, id.Port, m})
	}
	slices.SortFunc(list, func(a, b remembered) int {
		return cmp.Or(cmp.Compare(a.Guest, b.Guest), cmp.Compare(a.Of, b.Of), cmp.Compare(a.Protocol, b.Protocol), a.Address.Compare(b.Address))
	})
	return list
}

func writeMoved(path string, list []remembered) error {
	b, err := json.MarshalIndent(list, "", " ")
	if err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o700)
	}
	if err != nil {
		return err
	}
	return trust.WriteFile(path, append(b, '\n'))
}
