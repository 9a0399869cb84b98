// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"maps"
	"net/netip"
	"slices"
	"unicode/utf8"

	"github.com/fairlead/fairlead/internal/port"
)

// FromPublication returns what is sent of p to the host. Names longer than MaxName
// are truncated; labels that are not UTF-8 or beyond the limits are left out, in the
// order of their keys. The owner says so, and which if these fit, for the host's rules.
// What no receiver would accept even so (see Check) the caller keeps to itself.
func FromPublication(p port.Publication) Publication {
	w := Publication{
		Key: p.Key, Rule: p.Rule, OwnerPending: p.OwnerPending, Owner: fitOwner(p.Owner),
	}
	w.addOthers(p.Others)
	w.Host = make([]netip.AddrPort, 0, len(p.Decision.Host))
	for _, h := range p.Decision.Host {
		w.Host = append(w.Host, unmapPort(h))
	}
	if len(p.Origins) > 0 {
		w.Source = truncate(p.Origins[0].Source, MaxWord)
	}
	l := Labels{Yields: p.Decision.Yields, Alias: truncate(p.Decision.Alias(), MaxWord)}
	if p.Decision.Labelled() {
		l.Rule = truncate(p.Decision.Rule.Name, MaxReason)
	}
	if l != (Labels{}) {
		w.Labels = &l
	}
	w.Demands = demandsOf(p)
	return w
}

// demandsOf returns what a port was asked for by, as far as it is sent.
func demandsOf(p port.Publication) (list List[string]) {
	for _, o := range p.Origins {
		if _, err := port.ParseDemand(o.ID); o.Source == port.SourceDemand && err == nil && len(list) < MaxDemandsOfOne {
			list = append(list, o.ID)
		}
	}
	return list
}

// addOthers adds the owners to whom NAT rules lead, as far as they fit. Where engines
// name several owners, or not all fit, the owner counts as pending: rules that name one
// wait.
func (p *Publication) addOthers(others []port.OtherOwner) {
	total := 0
	for _, o := range others {
		if o.Rival {
			p.OwnerPending = true
			continue
		}
		fit := fitOwner(o.Owner)
		total += otherSize + ownerText(fit)
		if len(p.Others) == MaxOthers || total > MaxOtherBytes {
			p.OwnerPending = true
			return
		}
		p.Others = append(p.Others, fit)
	}
}

func fitOwner(o port.Owner) port.Owner {
	fit := port.Owner{
		Kind: o.Kind, Name: truncate(o.Name, MaxName), ID: truncate(o.ID, MaxName),
		Namespace: truncate(o.Namespace, MaxName), Cluster: truncate(o.Cluster, MaxName), Labels: fitLabels(o.Labels),
	}
	fit.LabelsOmitted = o.LabelsOmitted || len(fit.Labels) < len(o.Labels)
	if fit.LabelsOmitted && !o.LabelsOmitted {
		if keys := leftOut(o.Labels, fit.Labels); len(keys) > 0 {
			fit.LabelsLeftOut = &keys
		}
	}
	if h := o.Held; h != nil {
		fit.Held = &port.Held{Engine: truncate(h.Engine, MaxName), User: truncate(h.User, MaxName), Process: truncate(h.Process, MaxName)}
	}
	fit.NameCut = o.NameCut || fit.Name != o.Name || fit.Namespace != o.Namespace
	return fit
}

func fitLabels(labels map[string]string) map[string]string {
	total, fits := 0, len(labels) <= MaxLabels
	for k, v := range labels {
		total += len(k) + len(v)
		fits = fits && fit(k, v)
	}
	if fits && total <= MaxLabelBytes {
		return labels
	}
	out := make(map[string]string, MaxLabels)
	total = 0
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		v := labels[k]
		if !fit(k, v) || total+len(k)+len(v) > MaxLabelBytes {
			continue
		}
		if len(out) == MaxLabels {
			break
		}
		total += len(k) + len(v)
		out[k] = v
	}
	return out
}

// leftOut returns the keys of the labels that are not sent, or none if not all can be named.
func leftOut(labels, sent map[string]string) (keys []string) {
	total := 0
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		if _, ok := sent[k]; ok {
			continue
		}
		total += len(k)
		if len(keys) == MaxLabels || total > MaxLeftOut || !fit(k, "") {
			return nil
		}
		keys = append(keys, k)
	}
	return keys
}

func fit(k, v string) bool {
	return len(k) <= MaxLabelKey && len(v) <= MaxLabelValue && utf8.ValidString(k) && utf8.ValidString(v)
}

// FromUnpublished returns what is sent of a port that is not published. Texts that are too
// long are truncated; a key that no receiver accepts is reported by ok.
func FromUnpublished(p port.Publication) (w UnpublishedPort, ok bool) {
	w = UnpublishedPort{
		Key: p.Key, Rule: p.Decision.Rule, Reason: FromReason(p.Decision.Reason),
		Owner: port.Owner{
			Kind: p.Owner.Kind, Name: truncate(p.Owner.Name, MaxName), ID: truncate(p.Owner.ID, MaxName), Namespace: truncate(p.Owner.Namespace, MaxName),
			Cluster: truncate(p.Owner.Cluster, MaxName),
		},
		Demands: demandsOf(p),
	}
	w.Rule.Name = truncate(w.Rule.Name, MaxReason)
	if len(p.Origins) > 0 {
		w.Source = truncate(p.Origins[0].Source, MaxWord)
	}
	return w, checkKey(p.Key) == nil
}

// FitSources returns names of sources as a Snapshot has them: not too many, and truncated.
func FitSources(names []string) List[string] {
	out := make(List[string], 0, min(len(names), MaxIncomplete))
	for _, n := range names[:cap(out)] {
		out = append(out, truncate(n, MaxWord))
	}
	return out
}

// Equal reports whether both are the same.
func (p UnpublishedPort) Equal(q UnpublishedPort) bool {
	return p.Key == q.Key && p.Rule == q.Rule && p.Reason == q.Reason &&
		p.Source == q.Source && p.Owner.Equal(q.Owner) && slices.Equal(p.Demands, q.Demands)
}

// NewUnread returns a NAT rule for the wire, truncated.
func NewUnread(where, rule, reason string) Unread {
	return Unread{truncate(where, MaxReason), truncate(rule, MaxReason), truncate(reason, MaxReason)}
}

// Port returns p as the host's rules and tables take it: allowed by the guest,
// with one origin that names the source. Since and Dial are not on the wire.
func (p Publication) Port() port.Publication {
	l := p.Wish()
	var others []port.OtherOwner
	for _, o := range p.Others {
		others = append(others, port.OtherOwner{Owner: o})
	}
	d := port.Decision{Allow: true, Host: p.Host, Rule: l.Ref(), Yields: l.Yields}
	d.SetLabels(port.Labels{Alias: l.Alias})
	return port.Publication{
		Key: p.Key, Owner: p.Owner, Rule: p.Rule, OwnerPending: p.OwnerPending, Others: others,
		Origins:  append([]port.OriginInfo{{Origin: port.Origin{Source: p.Source}}}, DemandOrigins(p.Demands)...),
		Decision: d,
	}
}

// DemandOrigins returns the origins of a publication that is there because of these demands,
// without those that cannot be read.
func DemandOrigins(demands []string) (list []port.OriginInfo) {
	for _, text := range demands {
		if d, err := port.ParseDemand(text); err == nil {
			list = append(list, port.OriginInfo{
				Origin: port.Origin{Source: port.SourceDemand, ID: d.String()}, Detail: port.NewDetail("asked for as " + d.String()),
			})
		}
	}
	return list
}

// FromOutcome returns o for the wire. Its reason is cut to MaxReason.
func FromOutcome(o port.Outcome) Outcome {
	return Outcome{Key: o.Key, State: o.State, HostAddress: unmapPort(o.HostAddress), Reason: FromReason(o.Reason)}
}

// Port returns o. Since is not on the wire.
func (o Outcome) Port() port.Outcome {
	return port.Outcome{Key: o.Key, State: o.State, HostAddress: o.HostAddress, Reason: o.Reason.Reason}
}

func unmapPort(a netip.AddrPort) netip.AddrPort {
	if !a.IsValid() {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}
