// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"slices"

	"github.com/fairlead/fairlead/internal/rules"
	"github.com/fairlead/fairlead/internal/yamltree"
)

// HostKeys returns the keys of an entry of ParseHost, all of which need the second ones.
func HostKeys() (all, required []string) {
	return []string{"name", "guests", "path", "sha256", "args", "env", "directory"}, []string{"name", "guests", "path", "sha256"}
}

// ParseHost reads the programs of a host, which run as the user of the host peer.
func ParseHost(n yamltree.Node) (Policy, error) {
	keys, _ := HostKeys()
	return parseEntries(n, keys, completeHost)
}

func completeHost(n yamltree.Node, e *Entry) error {
	switch {
	case e.Name == "":
		return n.Errorf("no name: want the one by which guests ask for the program")
	case len(e.Guests) == 0:
		return n.Errorf(`no guest may have it run: want guests with their names ("*" for all)`)
	case e.Path == "":
		return n.Errorf("no path: want the program's")
	case e.SHA256 == "":
		return n.Errorf("no sha256: want that of the program (sha256sum PATH)")
	}
	return nil
}

// AskKeys returns the keys of an entry of ParseAsks, which needs the second ones and match or
// users.
func AskKeys() (all, required []string) {
	return []string{"name", "match", "users"}, []string{"name"}
}

// ParseAsks reads who in the guest may ask the host for which of its programs. The entries have
// nothing else.
func ParseAsks(n yamltree.Node) (Policy, error) {
	keys, _ := AskKeys()
	return parseEntries(n, keys, completeAsk)
}

func completeAsk(n yamltree.Node, e *Entry) error {
	switch {
	case e.Name == "":
		return n.Errorf("no name: want that of the program in the host's run.allow")
	case !e.containers() && len(e.Users) == 0:
		return n.Errorf(`nobody may ask for it: want match with name, namespace or labels (name: "*" for all containers), or users`)
	}
	return nil
}

func parseGuest(s string) (string, error) {
	if s == "" {
		return "", errors.New("want the name of a guest, or a pattern")
	}
	return s, nil
}

// HasGuest reports whether the guest may have the program of the host run.
func (e *Entry) HasGuest(name string) bool {
	return slices.ContainsFunc(e.Guests, func(pattern string) bool { return rules.Glob(pattern, name) })
}
