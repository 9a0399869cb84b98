// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/yamltree"
)

// File is the content of a rules file.
type File struct {
	Expose HostAddress // Asked if the file has none
	Rules  []Rule
}

// Parse reads a rules file; name names it in errors. The error joins all mistakes, each
// a *yamltree.Error with line, column, field and what is allowed.
func Parse(name string, data []byte) (File, error) {
	var f File
	root, err := yamltree.Parse(name, data)
	if err != nil || root.IsNull() {
		return f, err
	}
	entries, err := root.Map("expose", "rules")
	errs := []error{err}
	for _, e := range entries {
		if e.Key == "expose" {
			err = scalar(e.Node, &f.Expose, ParseExpose)
		} else {
			f.Rules, err = ParseList(e.Node)
		}
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return File{}, err
	}
	return f, nil
}

// ParseList reads a list of rules in a larger document. The error joins the first
// mistake of each rule.
func ParseList(n yamltree.Node) ([]Rule, error) {
	if n.IsNull() { // "rules:" with all rules commented out
		return nil, nil
	}
	if !n.IsList() {
		return nil, n.Errorf(`want a list of rules ("- action: allow")`)
	}
	var list []Rule
	var errs []error
	for _, item := range n.List() {
		r, err := parseRule(item)
		list, errs = append(list, r), append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return list, nil
}

func parseRule(n yamltree.Node) (Rule, error) {
	var r Rule
	var action string
	entries, err := n.Map("name", "match", "action", "hostPort", "hostAddress", "onConflict", "proxyProtocol")
	if err != nil {
		return r, err
	}
	at := map[string]yamltree.Node{}
	for _, e := range entries {
		at[e.Key] = e.Node
		switch e.Key {
		case "name":
			r.Name, err = text(e.Node)
		case "match":
			err = parseMatch(e.Node, &r.Match)
		case "action":
			err = scalar(e.Node, &action, parseAction)
			r.Deny = action == "deny"
		case "hostPort":
			err = scalar(e.Node, &r.HostPort, ParseHostPort)
		case "onConflict":
			err = scalar(e.Node, &r.OnConflict, ParseOnConflict)
		case "proxyProtocol":
			err = scalar(e.Node, &r.ProxyProtocol, ParseProxyProtocol)
		case "hostAddress":
			err = scalar(e.Node, &r.HostAddress, ParseHostAddress)
		}
		if err != nil {
			return r, err
		}
	}
	if _, ok := at["action"]; !ok {
		return r, n.Errorf("no action: want action: allow or action: deny")
	}
	if field, err := r.validate(); err != nil {
		return r, at[field].Errorf("%v", err)
	}
	return r, nil
}

// ParseOwner reads a match of an owner alone: name, namespace and labels.
func ParseOwner(n yamltree.Node) (Match, error) {
	var m Match
	err := parseFields(n, &m, "name", "namespace", "labels")
	return m, err
}

// ParsePortList reads one port, range or list of these with commas, or a YAML list of them.
func ParsePortList(n yamltree.Node) ([]PortRange, error) {
	var lists [][]PortRange
	err := several(n, &lists, ParsePorts)
	return slices.Concat(lists...), err
}

func parseMatch(n yamltree.Node, m *Match) error {
	return parseFields(n, m, "protocol", "ports", "address", "source", "owner", "name", "namespace", "labels", "guest")
}

// parseFields reads those fields of a match that are known.
func parseFields(n yamltree.Node, m *Match, known ...string) error {
	entries, err := n.Map(known...)
	if err != nil {
		return err
	}
	for _, e := range entries {
		switch e.Key {
		case "protocol":
			err = scalar(e.Node, &m.Protocol, port.ParseProtocol)
		case "ports":
			m.Ports, err = ParsePortList(e.Node)
		case "address":
			err = several(e.Node, &m.Addresses, ParseAddressMatch)
		case "source":
			err = several(e.Node, &m.Sources, parseSource)
		case "owner":
			err = several(e.Node, &m.Owners, parseOwner)
		case "name":
			m.Name, err = text(e.Node)
		case "namespace":
			m.Namespace, err = text(e.Node)
		case "guest":
			m.Guest, err = text(e.Node)
		case "labels":
			m.Labels, err = parseLabels(e.Node)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func parseLabels(n yamltree.Node) (map[string]string, error) {
	entries, err := n.Map()
	if err != nil {
		return nil, err
	}
	labels := make(map[string]string, len(entries))
	for _, e := range entries {
		if labels[e.Key], err = e.Text(); err != nil {
			return nil, err
		}
	}
	return labels, nil
}

// parseAction reads what a rule does.
func parseAction(s string) (string, error) {
	switch s {
	case "allow", "deny":
		return s, nil
	}
	return "", oneOf(s, []string{"allow", "deny"})
}

// ParseOnConflict reads "wait", "next" or "any".
func ParseOnConflict(s string) (port.OnConflict, error) {
	for _, c := range []port.OnConflict{port.OnConflictWait, port.OnConflictNext, port.OnConflictAny} {
		if s == c.String() {
			return c, nil
		}
	}
	return 0, oneOf(s, []string{"wait", "next", "any"})
}

// ParseProxyProtocol reads "v2".
func ParseProxyProtocol(s string) (port.ProxyProtocol, error) {
	if s == port.ProxyProtocolV2.String() {
		return port.ProxyProtocolV2, nil
	}
	return 0, oneOf(s, []string{port.ProxyProtocolV2.String()})
}

func parseSource(s string) (string, error) {
	for _, name := range Sources() {
		if s == name {
			return s, nil
		}
	}
	return "", oneOf(s, Sources())
}

func parseOwner(s string) (port.OwnerKind, error) {
	kinds := []string{"container", "service", "process", "unknown"}
	for _, name := range kinds {
		if s == name {
			var k port.OwnerKind
			err := k.UnmarshalText([]byte(s))
			return k, err
		}
	}
	return 0, oneOf(s, kinds)
}

func oneOf(s string, words []string) error {
	return fmt.Errorf("%q: want %s%s", s, yamltree.OneOf(words), yamltree.Suggest(s, words))
}

// text reads a text that is not empty: an empty glob would look as if it matched
// nothing and match everything.
func text(n yamltree.Node) (string, error) {
	s, err := n.Text()
	if err == nil && strings.TrimSpace(s) == "" {
		err = n.Errorf("%q: want a text that is not empty", s)
	}
	return s, err
}

func scalar[T any](n yamltree.Node, to *T, parse func(string) (T, error)) error {
	s, err := n.Text()
	if err != nil {
		return err
	}
	v, err := parse(s)
	if err != nil {
		return n.Errorf("%v", err)
	}
	*to = v
	return nil
}

// several reads one value or a list of at least one.
func several[T any](n yamltree.Node, to *[]T, parse func(string) (T, error)) error {
	items := n.List()
	if len(items) == 0 {
		return n.Errorf("an empty list: want at least one, or leave the key out to match all")
	}
	*to = make([]T, len(items))
	for i, item := range items {
		if err := scalar(item, &(*to)[i], parse); err != nil {
			return err
		}
	}
	return nil
}
