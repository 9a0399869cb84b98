// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"bytes"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/port"
)

// way is the chains that packets pass, the last one first.
type way struct {
	chain string
	from  *way // nil for a base chain
}

func (w *way) String() string {
	var names []string
	for ; w != nil; w = w.from {
		names = append(names, w.chain)
	}
	slices.Reverse(names)
	return strings.Join(names, " > ")
}

func (w *way) equal(o *way) bool {
	for w != nil && o != nil && w != o {
		if w.chain != o.chain {
			return false
		}
		w, o = w.from, o.from
	}
	return w == o
}

// detail describes a rule that packets meet on a way. It refers to nothing of the
// compiler's that changes or is large. It implements port.Describer.
type detail struct {
	table ruleset.TableID
	way   *way
	raw   []byte
}

func (e *entry) detail() *detail {
	return &detail{table: e.rule.chain.table.id, way: e.act.way, raw: e.rule.raw}
}

// where names the way from the hook to the rule.
func (d *detail) where() string { return d.table.String() + " " + d.way.String() }

func (d *detail) rule() string { return ruleset.Text(d.table, d.raw) }

func (d *detail) String() string { return d.where() + ": " + d.rule() }

// Equal implements port.Describer.
func (d *detail) Equal(o port.Describer) bool {
	e, ok := o.(*detail)
	return ok && (d == e || d.table == e.table && d.way.equal(e.way) && bytes.Equal(d.raw, e.raw))
}
