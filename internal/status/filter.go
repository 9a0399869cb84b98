// SPDX-License-Identifier: Apache-2.0

package status

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/config/words"
	"github.com/fairlead/fairlead/internal/port"
)

// Filter selects the rows that match all its terms. The zero value selects all.
type Filter struct{ terms []term }

type term struct{ key, value string }

// FilterKeys returns the keys of filter terms.
func FilterKeys() []string {
	return []string{"port", "protocol", "address", "state", "owner", "source", "guest", "node"}
}

// ParseFilter reads terms: KEY=VALUE, which matches fields that contain the value
// (port, protocol and state must be equal), or a word, which matches any field that
// contains it. Case is ignored.
func ParseFilter(texts []string) (Filter, error) {
	var f Filter
	keys := FilterKeys()
	for _, t := range texts {
		key, value, ok := strings.Cut(t, "=")
		if !ok {
			key, value = "", t
		}
		key, value = strings.ToLower(strings.TrimSpace(key)), strings.ToLower(strings.TrimSpace(value))
		switch {
		case ok && !slices.Contains(keys, key):
			return f, fmt.Errorf("--filter %q: unknown key %q%s: want %s", t, key, words.Suggest(key, keys), words.OneOf(keys))
		case value == "":
			return f, fmt.Errorf("--filter %q: want KEY=VALUE or a word", t)
		case key == "state" && value != lostState:
			if err := new(port.State).UnmarshalText([]byte(value)); err != nil {
				return f, fmt.Errorf("--filter %q: %w", t, err)
			}
		}
		f.terms = append(f.terms, term{key, value})
	}
	return f, nil
}

// Match reports whether the filter selects the row.
func (f Filter) Match(p Publication) bool {
	for _, t := range f.terms {
		if !t.match(p) {
			return false
		}
	}
	return true
}

// List returns the list with the selected rows.
func (f Filter) List(l List) List {
	if len(f.terms) > 0 {
		l.Publications = slices.DeleteFunc(slices.Clone(l.Publications), func(p Publication) bool { return !f.Match(p) })
	}
	return l
}

// Published returns the list without what guests of a host do not publish.
func (l List) Published() List {
	l.Publications = slices.DeleteFunc(slices.Clone(l.Publications), func(p Publication) bool { return p.Unpublished })
	return l
}

func (t term) match(p Publication) bool {
	has := func(texts ...string) bool {
		return slices.ContainsFunc(texts, func(s string) bool { return strings.Contains(strings.ToLower(s), t.value) })
	}
	var sources []string
	for _, o := range p.Origins {
		sources = append(sources, o.Source)
	}
	owner := []string{p.Owner.Kind.String(), p.Owner.Name, p.Owner.ID, p.Owner.Namespace, p.Owner.Cluster}
	for _, o := range p.Others {
		owner = append(owner, o.Name, o.Namespace)
	}
	addresses := []string{p.guestAddress()}
	for _, a := range p.HostAddresses {
		addresses = append(addresses, a.String())
	}
	switch t.key {
	case "port":
		return t.value == strconv.Itoa(int(p.Port)) || t.value == p.Key.Slot().String()
	case "protocol":
		return t.value == p.Protocol.String()
	case "state":
		return t.value == p.shownState()
	case "address":
		return has(addresses...)
	case "owner":
		return has(owner...)
	case "source":
		return has(sources...)
	case "node":
		return has(p.Node)
	case "guest":
		return has(p.Guest, p.GuestName)
	}
	return has(slices.Concat(owner, addresses, sources, []string{p.Key.Slot().String(), p.shownState(), p.Guest, p.GuestName, p.Node, p.Reason})...)
}
