// SPDX-License-Identifier: Apache-2.0

package wire

import "github.com/fairlead/fairlead/internal/port"

// TextBytes is what a publication holds on to beyond its fixed size, in bytes.
func (p Publication) TextBytes() int {
	n := len(p.Source) + ownerText(p.Owner)
	if p.Labels != nil {
		n += labelsSize + len(p.Labels.Rule) + len(p.Labels.Alias)
	}
	for _, o := range p.Others {
		n += otherSize + ownerText(o)
	}
	for _, d := range p.Demands {
		n += len(d)
	}
	return n
}

// labelsSize is the memory of what labels ask for beside its text.
const labelsSize = 48

// heldSize is the memory of how a user's container holds its port, beside its text.
const heldSize = 48

// otherSize is the memory that one of several owners takes beside its text.
const otherSize = 128

func ownerText(o port.Owner) int {
	n := len(o.Name) + len(o.ID) + len(o.Namespace) + len(o.Cluster)
	if h := o.Held; h != nil {
		n += heldSize + len(h.Engine) + len(h.User) + len(h.Process)
	}
	for k, v := range o.Labels {
		n += len(k) + len(v)
	}
	for _, k := range o.LeftOut() {
		n += len(k)
	}
	return n
}
